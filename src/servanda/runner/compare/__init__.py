# Comparisons without a contract at hand: kernel strings, presets, reference packs.
