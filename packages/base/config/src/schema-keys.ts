/** The keys of a schema: what may be written at a place, and all of them, for lines that help and for tests of the pages. */
import * as z from 'zod';

/** What may stand at one place, without what says that it may be absent or null: several of a union. */
function shapesOf(schema: z.core.$ZodType): readonly z.core.$ZodType[] {
  if (
    schema instanceof z.ZodOptional ||
    schema instanceof z.ZodNullable ||
    schema instanceof z.ZodDefault ||
    schema instanceof z.ZodPrefault
  )
    return shapesOf(schema.def.innerType);
  if (schema instanceof z.ZodUnion) return schema.def.options.flatMap(shapesOf);
  if (schema instanceof z.ZodArray) return shapesOf(schema.def.element);
  return [schema];
}

/** Keys of what stands there: of an array, of each of its elements; of a record, "*". */
function fieldsOf(schema: z.core.$ZodType): Map<string, z.core.$ZodType[]> {
  const fields = new Map<string, z.core.$ZodType[]>();
  for (const shape of shapesOf(schema)) {
    const own: [string, z.core.$ZodType][] =
      shape instanceof z.ZodObject
        ? Object.entries(shape.shape)
        : shape instanceof z.ZodRecord
          ? [['*', shape.def.valueType]]
          : [];
    for (const [key, value] of own) fields.set(key, [...(fields.get(key) ?? []), value]);
  }
  return fields;
}

/** The keys of what stands at `path`; none where that has no keys of its own. */
export function keysAt(schema: z.core.$ZodType, path: readonly PropertyKey[]): string[] {
  let here: readonly z.core.$ZodType[] = [schema];
  for (const key of path) {
    if (typeof key === 'number') continue;
    here = here.flatMap((each) => {
      const fields = fieldsOf(each);
      return fields.get(String(key)) ?? fields.get('*') ?? [];
    });
  }
  return [...new Set(here.flatMap((each) => [...fieldsOf(each).keys()]))].filter((key) => key !== '*');
}

/** All keys with the way to them, "redis.policies.*.maxShare". */
export function keyPaths(schema: z.core.$ZodType): string[] {
  return [...fieldsOf(schema)].flatMap(([key, values]) => [
    ...(key === '*' ? [] : [key]),
    ...new Set(values.flatMap(keyPaths).map((below) => `${key}.${below}`)),
  ]);
}
