# Promotion: offline -> shadow -> canary -> full, on evidence alone; pure.
