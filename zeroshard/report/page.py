def render(runs): return "thin"
