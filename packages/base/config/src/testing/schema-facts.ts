/** Defaults and bounds of a schema's keys, as a page would write them. */
import * as z from 'zod';

export interface KeyFacts {
  /** undefined: none, and so required unless `isOptional`. */
  readonly default: unknown;
  readonly isOptional: boolean;
  readonly bounds: { readonly from?: number; readonly above?: number; readonly to?: number };
}

interface Json {
  readonly default?: unknown;
  readonly type?: string;
  readonly properties?: Readonly<Record<string, Json>>;
  readonly required?: readonly string[];
  readonly anyOf?: readonly Json[];
  readonly oneOf?: readonly Json[];
  readonly minimum?: number;
  readonly exclusiveMinimum?: number;
  readonly maximum?: number;
}

/** By the way to each key, "gpu.device"; a list's and a record's own keys are not looked at. */
export function keyFacts(schema: z.ZodType): Map<string, KeyFacts> {
  const facts = new Map<string, KeyFacts>();
  const add = (json: Json, way: string): void => {
    for (const kind of [json, ...(json.anyOf ?? []), ...(json.oneOf ?? [])]) {
      for (const [key, field] of Object.entries(kind.properties ?? {})) {
        facts.set(`${way}${key}`, {
          default: field.default,
          isOptional: !kind.required?.includes(key),
          bounds: boundsOf(field),
        });
        add(field, `${way}${key}.`);
      }
    }
  };
  add(z.toJSONSchema(schema, { io: 'input', unrepresentable: 'any' }) as Json, '');
  return facts;
}

function boundsOf(field: Json): KeyFacts['bounds'] {
  const number = [field, ...(field.anyOf ?? [])].find(({ type }) => type === 'integer' || type === 'number');
  if (number === undefined) return {};
  const { minimum, exclusiveMinimum, maximum } = number;
  return {
    ...(minimum !== undefined && { from: minimum }),
    ...(exclusiveMinimum !== undefined && { above: exclusiveMinimum }),
    ...(maximum !== undefined && maximum < Number.MAX_SAFE_INTEGER && { to: maximum }),
  };
}
