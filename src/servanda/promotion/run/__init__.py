# Promotions as they run: one evaluation of a build after another, until its evidence moves it.
