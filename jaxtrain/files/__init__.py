"""Opens files that another user or program may have written: as regular files, or not at all.

Nothing here knows a file's content. A run directory and a folder of weights are data, possibly from
an untrusted source: a name in one may be a symbolic link to a file of the user's, or a pipe without
a writer. All other packages open files that they did not just create through this one.
"""
