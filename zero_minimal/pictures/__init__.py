"""How anything is drawn."""
