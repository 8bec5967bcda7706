# Running promotions: repeated evaluations of a build until its evidence moves it.
