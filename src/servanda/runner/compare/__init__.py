# Comparisons without a contract: kernel strings, presets, reference packs.
