"""The original's elastic launcher: not provided; importing this raises an error that names what to use instead."""

from bagua_ref.base.not_provided import not_provided

raise not_provided("distributed.run")
