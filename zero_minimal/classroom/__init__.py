"""The classroom: starters for learners, and the grader."""
