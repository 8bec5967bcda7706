# Promoting: one look after another at a build, until its evidence moves it.
