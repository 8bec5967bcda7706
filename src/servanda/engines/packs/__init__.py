# Registries of reference packs: folders, HTTP servers, OCI registries and the Hugging Face Hub.
