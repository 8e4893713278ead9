"""What watches from outside: no lesson knows that it is watched."""
