# Authoring: contracts written, derived, calibrated, compared and tested.
