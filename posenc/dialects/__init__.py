"""What the runtimes make of a checkpoint's position settings: one record, readers, emulators,
writers.

Nothing here loads torch or transformers: a config of a few kilobytes answers in milliseconds.
"""
