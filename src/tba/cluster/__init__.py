"""The journey as Ray actors: depot, trainer, searchers, and the driver that looks after them."""
