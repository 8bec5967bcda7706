# Sequential statistics that stay valid while someone watches.
