"""Models. Each package registers one ``ModelSpec``; none of them imports the trainer, the plugins or the data."""
