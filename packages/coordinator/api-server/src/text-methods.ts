/**
 * What texts can do in a chat template, as in Python: `@huggingface/jinja` 0.5 takes no argument to `strip`, `lstrip` and `rstrip`, and
 * has neither `join` nor `format`. Its class of texts has a table of methods for each text; these go into all of them.
 */
import { Environment } from '@huggingface/jinja';

/** As the library's values are, as far as they are used here. */
interface Value {
  readonly type: string;
  readonly value: unknown;
  toString(): string;
}
type Method = (text: string, args: readonly Value[], own: () => Value) => string | Value;
type Table = Map<string, Value>;

/** The library does not export its values: these are what it makes of a text and of a function. */
const library = new Environment();
const TextValue = library.set('text', '').constructor as new (text: string) => Value;
const FunctionValue = library.set('method', () => '').constructor as new (call: (args: Value[]) => Value) => Value;

/** Without an argument, or with none, as the library does: blanks. */
const stripping =
  (atStart: boolean, atEnd: boolean): Method =>
  (text, [chars], own) => {
    if (chars === undefined || chars.type === 'NullValue') return own();
    if (typeof chars.value !== 'string') throw new Error(`strip takes a text, not ${chars.type}`);
    const [all, gone] = [Array.from(text), new Set(chars.value)];
    let [from, end] = [0, all.length];
    while (atStart && from < end && gone.has(all[from]!)) from++;
    while (atEnd && end > from && gone.has(all[end - 1]!)) end--;
    return all.slice(from, end).join('');
  };

const methods: Readonly<Record<string, Method>> = {
  strip: stripping(true, true),
  lstrip: stripping(true, false),
  rstrip: stripping(false, true),
  join: (text, [items]) => {
    if (!Array.isArray(items?.value)) throw new Error('join takes a list');
    return items.value.map(textOf).join(text);
  },
  format: (text, args) => {
    const last = args.at(-1);
    const named = last?.type === 'KeywordArgumentsValue' ? (last.value as Map<string, Value>) : undefined;
    let next = 0;
    return text.replaceAll(/\{\{|\}\}|\{([^{}]*)\}|[{}]/g, (found, name: string | undefined) => {
      if (found.length === 1) throw new Error(`format has a single ${found}`);
      if (name === undefined) return found[0]!;
      const value = name === '' ? args[next++] : /^\d+$/.test(name) ? args[Number(name)] : named?.get(name);
      if (value === undefined || (value === last && named !== undefined))
        throw new Error(`format has nothing for ${found}`);
      return writtenOf(value);
    });
  },
};

/** As Python's `format` writes it; what is no absent name of Jinja's is written as nothing. */
function writtenOf({ type, value }: Value): string {
  if (type === 'StringValue' || type === 'IntegerValue' || type === 'FloatValue') return String(value);
  if (type === 'BooleanValue') return value === true ? 'True' : 'False';
  if (type === 'NullValue') return 'None';
  if (type === 'UndefinedValue') return '';
  throw new Error(`format takes texts and numbers, not ${type}`);
}

function textOf(value: Value): string {
  if (typeof value.value !== 'string') throw new Error(`join takes texts, not ${value.type}`);
  return value.value;
}

const { get: tableOf } = Object.getOwnPropertyDescriptor(TextValue.prototype, 'builtins')! as { get: () => Table };
Object.defineProperty(TextValue.prototype, 'builtins', {
  configurable: true,
  get(this: Value): Table {
    const table = tableOf.call(this);
    if (table.has('join')) return table; // this text was asked before
    for (const [name, method] of Object.entries(methods)) {
      const own = table.get(name)?.value as ((args: Value[]) => Value) | undefined;
      const call = (args: Value[]): Value => {
        const made = method(this.value as string, args, () => own!([]));
        return typeof made === 'string' ? new TextValue(made) : made;
      };
      table.set(name, new FunctionValue(call));
    }
    return table;
  },
});
