"""What a run saves of itself as it goes, and how it goes back to what it has saved.

Does not belong here: how a state is written and read (checkpoint/).
"""
