"""SGLang's side of a sync."""
