"""DeepSpeed layers on our backends.

``native`` is a layer's forward, ``meeting`` and ``agreement`` what its ranks decide, and
``layer_state`` what it knows. ``experts`` and ``recognise`` say how its experts are cut, ``watch``
and ``appearance`` whether they are others.
"""
