"""All pictures: style.py defines their common look, and each other file draws one subject.

A function draw_… returns a Figure, which style.save writes or a notebook shows; a function …_panel draws on an axis.
"""
