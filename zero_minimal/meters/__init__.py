"""Instruments that observe from outside: the lessons' code does not know that it is measured."""
