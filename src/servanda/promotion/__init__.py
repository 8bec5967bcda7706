# Promotion: offline, shadow, canary, full; a state machine that moves on evidence alone.
