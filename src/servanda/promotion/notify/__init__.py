# Notifications: a promotion's decisions for programs and people.
#
# Each is delivered at least once, always with the same key, by which a receiver drops repeats.
