# Calibration: from a run of an accepted pair of kernels to the limits that such a pair keeps.
