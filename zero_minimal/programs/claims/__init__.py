"""Claims about ZeRO, each settled by a run in a Lab: card_01 to card_28."""
