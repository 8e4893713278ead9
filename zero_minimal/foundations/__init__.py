"""What the lessons stand on: ranks, collectives, layout, backward, precision, optimizers, …"""
