"""What our HTML pages share: their frame, how templates are rendered, how plots look.

comes in: templates of other rooms, figures of matplotlib
goes out: text; SVG to be put into HTML
may import: nothing
read first: render.py
"""
