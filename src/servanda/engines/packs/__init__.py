# Reference packs: the engine that replays them, and registries (folders, HTTP, OCI, the Hub).
