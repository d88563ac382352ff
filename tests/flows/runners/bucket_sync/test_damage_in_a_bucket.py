"""Damage in a bucket: noticed, set aside, mended or computed again."""

import pytest

from stages.contract.errors import DamagedArtifactError
from tests.flows.runners.bucket_sync.hosts import object_of
from tests.object_storage import client


def alter(bucket, key):
    body = bytearray(client().get_object(Bucket=bucket, Key=key)["Body"].read())
    body[0] ^= 1
    client().put_object(Bucket=bucket, Key=key, Body=bytes(body))


def truncate(bucket, key):
    client().put_object(Bucket=bucket, Key=key, Body=b"x")


def delete(bucket, key):
    client().delete_object(Bucket=bucket, Key=key)


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (truncate, "large.txt", "has 1 bytes, not 4000"),
        (delete, "tokens", "has 0 bytes, not 11"),
        (truncate, "manifest.json", "is unreadable"),
    ],
)
def test_damage_in_the_bucket_is_set_aside_and_computed_again(near, far, damage, name, said):
    artifact = near.make()
    damage(*object_of(near.store, name))
    again = far.make()
    assert said in far.said()
    assert "Set aside in s3://" in far.said()
    assert len(far.requests) == 1
    assert again.file("checkpoint/weights").read_text() == "made weights"
    assert [entry.kind for entry in far.store.entries()].count("aside") == 1
    assert near.store.load("make", artifact.manifest.key).manifest == again.manifest


def test_damage_that_keeps_its_size_is_noticed_when_an_input_arrives(near, far):
    artifact = near.make()
    alter(*object_of(near.store, "weights"))
    with pytest.raises(DamagedArtifactError, match=r"has changed"):
        near.store.verify(artifact)
    with pytest.raises(DamagedArtifactError, match=r"has changed.* Set aside in s3://"):
        far.make("read", artifact.ref("checkpoint"))
    assert far.requests == []
    assert far.store.load("make", artifact.manifest.key) is None
