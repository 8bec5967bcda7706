# Rehearsal: contracts that are tested themselves, on series, recorded runs and a virtual clock.
