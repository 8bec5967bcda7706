# What the gateway costs beside a bare pass-through, and what becomes of it under faults.
