from bagua_ref.base.not_provided import not_provided  # noqa: D100

raise not_provided("distributed.launch")
