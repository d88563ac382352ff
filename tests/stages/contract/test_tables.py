import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.contract.errors import UserError
from stages.tables.parts import Part
from stages.tables.schemas import (
    PROMPTS,
    RESPONSES,
    SCHEMAS,
    TableWriter,
    num_rows,
    open_table,
    read_batches,
    read_rows,
    write_table,
)


def example(kind, number):
    """A value of an Arrow type."""
    if pa.types.is_struct(kind):
        return {kind.field(i).name: example(kind.field(i).type, number) for i in range(len(kind))}
    if pa.types.is_map(kind):
        return [("part", float(number))]
    if pa.types.is_list(kind):
        return [example(kind.value_type, number + i) for i in range(number % 3)]
    if pa.types.is_boolean(kind):
        return number % 2 == 0
    if pa.types.is_floating(kind):
        return float(number) / 4
    return f"text {number} ü" if pa.types.is_string(kind) else number


def rows_of(schema, count):
    return [
        {
            column.name: None
            if column.nullable and number % 4 == 0
            else example(column.type, number)
            for column in schema
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [25, 0])
@pytest.mark.parametrize("name", SCHEMAS)
def test_rows_come_back_as_they_were_written(tmp_path, name, count):
    rows = rows_of(SCHEMAS[name], count)
    path = tmp_path / "t.parquet"
    assert write_table(path, SCHEMAS[name], iter(rows)) == count
    assert list(read_rows(path, SCHEMAS[name])) == rows
    assert num_rows(path) == count


def test_several_tables_are_read_in_order_and_in_bounded_batches(tmp_path):
    paths = [tmp_path / f"{number}.parquet" for number in range(3)]
    rows = rows_of(PROMPTS, 30)
    for number, path in enumerate(paths):
        with TableWriter(path, PROMPTS, rows_per_group=4) as writer:
            for row in rows[10 * number : 10 * number + 10]:
                writer.write(row)
    assert list(read_rows(paths, PROMPTS)) == rows
    assert all(batch.num_rows <= 3 for batch in read_batches(paths, PROMPTS, batch_rows=3))
    names = list(read_rows(paths, PROMPTS, columns=["prompt_id"]))
    assert names == [{"prompt_id": row["prompt_id"]} for row in rows]


def test_wrong_files_are_refused_by_name(tmp_path):
    other, text = tmp_path / "other.parquet", tmp_path / "text.parquet"
    pq.write_table(pa.table({"question": ["a"]}), other)
    text.write_text("not parquet")
    cases = [
        (text, "is not a Parquet file"),
        (other, r"columns of the 'responses' table: has question; wants prompt_id"),
    ]
    for path, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            open_table(path, RESPONSES)
        assert str(path) in caught.value.message
        assert caught.value.remedy


def test_a_part_of_an_attempt_whose_end_is_lost_is_set_aside(tmp_path):
    part = Part(tmp_path, PROMPTS, 0, 5)
    warnings = []
    assert part.read(warnings.append) == []
    part.save(rows_of(PROMPTS, 5))
    assert part.read(warnings.append) == list(rows_of(PROMPTS, 5))
    assert warnings == []
    part.path.write_bytes(part.path.read_bytes()[:-20])
    assert part.read(warnings.append) == []
    assert not part.path.exists()
    assert "Set aside as" in warnings[0]


def test_a_changed_byte_that_changes_rows_is_always_noticed(tmp_path):
    part = Part(tmp_path, PROMPTS, 0, 2)
    part.save(rows_of(PROMPTS, 2))
    whole = part.path.read_bytes()
    rows = part.read(pytest.fail)
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1
        part.path.write_bytes(content)
        warnings = []
        assert part.read(warnings.append) == rows or "Set aside" in "".join(warnings), place
