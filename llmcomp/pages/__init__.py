"""What our HTML pages share: their frame, how templates are rendered, plain charts.

comes in: templates of other rooms, numbers
goes out: text; SVG to be put into HTML
may import: nothing
read first: render.py
"""
