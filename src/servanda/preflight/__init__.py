# The sync drill: does what a trainer updates reach the kernel that draws its rollouts?
