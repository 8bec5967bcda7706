# Effects: telling the world what a promotion decided, once.
