def draw_replication(content): return None
