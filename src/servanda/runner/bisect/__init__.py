# What makes B differ from A: the module, the build, the setting.
