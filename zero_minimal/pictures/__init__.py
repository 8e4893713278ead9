"""How anything is drawn: style.py is the look of all pictures, each other file a subject.

A function draw_… returns a Figure, which style.save writes and a notebook shows; a function …_panel draws on an axis.
"""
