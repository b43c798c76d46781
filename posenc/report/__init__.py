"""How every command speaks: pages, drawings, progress, the machine, files, failures."""
