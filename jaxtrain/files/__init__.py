"""Files that somebody else may have made: opened as what they are, or refused.

Nothing here knows what a file holds. A run directory and a folder of weights are data, perhaps a
stranger's: a name in one may be a symbolic link to a file of the user's, or a pipe that nobody
writes to. All other packages open through this one what they did not just create.
"""
