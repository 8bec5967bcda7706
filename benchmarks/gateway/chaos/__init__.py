# What becomes of users, rows and decisions when something breaks.
