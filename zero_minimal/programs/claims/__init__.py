"""Claims about ZeRO, each settled by a run in a Lab: card_01 to card_28.

A card is a function of a lab (programs/lab.py). It runs something that could refute its claim, and returns a verdict
and a number, as in `return "true if", 3.75`. The verdict is "true", "true if", "false" or "not shown". The card says
what the number is, and its unit: GB are 10⁹ bytes and MB 10⁶. All sizes come from the lab; every rank runs the card.
"""

# Write your name and grade this file once: the grader names your eight cards. The name also draws the sizes that they
# run with. Write no other card.
NAME = ""

# Three answers in words, for your teacher: at least 40 words each. The grader counts the words, and reads none.

# Which of your eight claims did you believe, or would others? Which of its words make it believable, and on which rung
# of the page's ladder does it fall? If it is true: on which rung did you expect it to fall?
BELIEVED = ""

# One of your cards has evidence that is not enough. Which experiment should its author have made? What differs and what
# is alike, how many seeds, and which result would make you say "false", and which one "true"?
DESIGNED = ""

# Which of your own eight runs is the weakest? Name what else could explain its number, or what this machine cannot
# show, and the run on a larger one that would decide.
WEAKEST = ""
