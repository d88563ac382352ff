"""The store in a bucket: object storage behind a local folder that stages see."""
