# Changes: what one version of a contract promises more or less than another.
