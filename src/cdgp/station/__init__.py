"""The inspection station: images in, decisions out, doubtful ones to people, one trail of it all.

One process serves a folder, its home. Nothing imports this room but the command line.
"""
