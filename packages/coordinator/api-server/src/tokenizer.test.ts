/** Text to ids and back against the plain library, chat templates, and folders that are damaged. */
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import fc from 'fast-check';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { ChatTemplate } from './chat-template.ts';
import { tokenToBytes } from './detokenizer.ts';
import { GenerationCache } from './fast-encode.ts';
import { LibraryTokenizer } from './library.ts';
import { loadTokenizer } from './tokenizer.ts';

const demoDir = join(import.meta.dirname, '../../../../models/demo/model');
/** Tokens, and the rows of the embedding: ids beyond the tokens mean nothing. */
const [vocabularySize, embeddingRows] = [3_481, 3_520];
const readDemo = (name: string) => JSON.parse(readFileSync(join(demoDir, name), 'utf8'));
const plain = () => new LibraryTokenizer(readDemo('tokenizer.json'), readDemo('tokenizer_config.json'));

const table = '# Employees\n| 1 | John Doe | 29 | Engineer | Canada |\n| 2 | Jane Smith | 34 | Doctor | Brazil |';
const tokenizer = loadTokenizer(demoDir);
const library = plain();
const textArbitrary = fc.oneof(
  fc.string({ unit: 'grapheme' }),
  fc.string({ unit: 'binary' }),
  fc
    .array(fc.constantFrom(' John', 'Doe', '\n', '  ', '|', ' 29', '</s>', '<s>', '日本', '😀', "'s", '\r\n\t', 'é'))
    .map((parts) => parts.join('')),
);

describe('encode', () => {
  it('gives the ids of the library for any text', () => {
    fc.assert(
      fc.property(textArbitrary, (text) => {
        expect(tokenizer.encode(text, { addSpecialTokens: true })).toEqual(
          library.encode(text, { add_special_tokens: true }).ids,
        );
      }),
      { numRuns: 300 },
    );
  });

  it('never promises more tokens than there are', () => {
    fc.assert(
      fc.property(textArbitrary, (text) => {
        expect(tokenizer.leastTokens(text)).toBeLessThanOrEqual(
          tokenizer.encode(text, { addSpecialTokens: false }).length,
        );
      }),
    );
    expect(tokenizer.leastTokens('x'.repeat(1_000_000))).toBeGreaterThan(4_096);
  });

  it('gives up early on what no model takes', () => {
    const encode = (text: string, maxTokens: number) => tokenizer.encode(text, { addSpecialTokens: true, maxTokens });
    expect(encode(' John'.repeat(10), 10)).toHaveLength(10);
    expect(() => encode(' John'.repeat(11), 10)).toThrow('prompt: more than 10 tokens');
    expect(() => encode('x'.repeat(300_000), 1e9)).toThrow('300000 characters without a break');
    expect(encode(' John'.repeat(11), 1e9)).toHaveLength(11);
  });

  it('keeps a bounded cache', () => {
    const cache = new GenerationCache<number>(10);
    for (let key = 0; key < 1_000; key++) {
      cache.set(String(key), key);
      expect(cache.get('0')).toBe(0); // in use all the time: survives
      expect(cache.size).toBeLessThanOrEqual(20);
    }
    expect(cache.get('500')).toBeUndefined();
  });
});

describe('decode', () => {
  it('emits, token by token, the library’s decode without an unfinished last character', () => {
    fc.assert(
      fc.property(fc.array(fc.nat(embeddingRows - 1), { maxLength: 40 }), (ids) => {
        const whole = ids.length === 0 ? '' : libraryDecode(ids.filter((id) => id < vocabularySize));
        const emitted = tokenizer.decode(ids);
        expect([emitted, `${emitted}\uFFFD`]).toContain(whole);
      }),
      { numRuns: 500 },
    );
  });

  it('gives any text back, and never shows a half character', () => {
    fc.assert(
      fc.property(fc.string({ unit: 'grapheme' }), (text) => {
        const detokenizer = tokenizer.detokenizer();
        const pieces = tokenizer.encode(text, { addSpecialTokens: false }).map((id) => detokenizer.push(id));
        expect(pieces.join('')).toBe(text);
        for (const piece of pieces) expect(piece).not.toMatch(/\p{Surrogate}/u);
      }),
    );
  });

  it('reads SentencePiece vocabularies', () => {
    const toBytes = tokenToBytes(
      {
        type: 'Sequence',
        decoders: [
          { type: 'Replace', pattern: { String: '▁' }, content: ' ' },
          { type: 'ByteFallback' },
          { type: 'Fuse' },
          { type: 'Strip' },
        ],
      },
      'x',
    );
    const bytes = ['▁Hello', '▁', '<0xE6>', '<0x97>', '<0xA5>', '!'].map((token) => Buffer.from(toBytes(token)));
    expect(Buffer.concat(bytes).toString()).toBe(' Hello 日!');
    expect(() => tokenToBytes({ type: 'WordPiece' }, 'dir/tokenizer.json')).toThrow(
      'dir/tokenizer.json: decoder "WordPiece" is not served',
    );
  });
});

describe('chat template of the demonstration model', () => {
  it('writes table, questions and answers as the model was trained', () => {
    expect(
      tokenizer.chatPrompt([
        { role: 'system', content: `${table}\n` },
        { role: 'user', content: 'What is the age of Jane Smith?' },
        { role: 'assistant', content: '34' },
        { role: 'user', content: 'Question: What is the country of John Doe?' },
      ]),
    ).toBe(
      `${table}\nQuestion: What is the age of Jane Smith?\nAnswer: 34\nQuestion: What is the country of John Doe?\nAnswer:`,
    );
  });

  it('takes the table from the first user message too', () => {
    const prompt = `${table}\nQuestion: What is the age of Jane Smith?\nAnswer:`;
    expect(tokenizer.chatPrompt([{ role: 'user', content: `${table}\nWhat is the age of Jane Smith?` }])).toBe(prompt);
    expect(tokenizer.chatPrompt([{ role: 'user', content: prompt }])).toBe(prompt);
  });
});

describe('a chat template', () => {
  const readsParts = (text: string): boolean => new ChatTemplate(text, {}, 'dir').readsParts;

  it.each([
    "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
    '{%- for m in messages -%}{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for c in m.content -%}{{ c.text }}{%- endfor -%}{%- endif -%}{%- endfor -%}',
    '{%- macro text(content) -%}{%- for item in content -%}{{ item.text }}{%- endfor -%}{%- endmacro -%}',
  ])('that loops over what a message holds reads its parts: %s', (text) => expect(readsParts(text)).toBe(true));

  it.each([
    '{% for message in messages %}{{ message.content }}{% endfor %}',
    "{% for m in messages %}{% set content = m['content'] | trim %}{% for l in lines %}{{ l }}{% endfor %}{% endfor %}",
    '{# for part in content #}{{ messages[0].content }}',
  ])('that does not takes texts: %s', (text) => expect(readsParts(text)).toBe(false));

  it.each<[string, string, string]>([
    // As Jinja2 3.1.6 renders them.
    ["{{ m.lstrip('\\n') }}", '\n    indented\n', '    indented\n'],
    ["{{ m.rstrip('\\n') }}", 'line  \n\n', 'line  '],
    ["{{ m.strip('\\n') }}", '\n  both  \n', '  both  '],
    ["{{ m.strip('<>') }}", '<<a<>b>>', 'a<>b'],
    ["{{ m.strip('') }}", ' a ', ' a '],
    ['{{ m.strip() }}|{{ m.lstrip() }}|{{ m.rstrip(none) }}', '\n a \n', 'a|a \n|\n a'],
    ["{{ m.strip('é😀') }}", '😀éaé😀', 'a'],
    ["{{ (m.split('</think>')|last).lstrip('\\n') }}", '<think>\nx\n</think>\n\n  y', '  y'],
    [
      "{{ m.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}",
      '<think>\n  x  \n</think>\n\n y',
      '  x  ',
    ],
    ["{{ ', '.join(['a', m]) }}", 'b', 'a, b'],
    ["{{ '\\n'.join(m.split(' ')) }}", 'a b c', 'a\nb\nc'],
    ["{{ 'a{}b{}'.format(m, 1) }}", 'x', 'axb1'],
    ["{{ '{1}{{}}{0} {n}'.format(m, 2, n=1.5) }}", 'x', '2{}x 1.5'],
    ["{{ '{}{}{}'.format(true, none, m.name) }}", 'x', 'TrueNone'],
  ])('says of texts what Jinja2 says: %s of %j', (text, content, wanted) => {
    const template = new ChatTemplate(`{% set m = messages[0].content %}${text}`, {}, 'dir');
    expect(template.render([{ role: 'user', content }])).toBe(wanted);
  });

  it.each([
    ["{{ 'a{:>3}'.format(1) }}", /format/],
    ["{{ 'a{}'.format() }}", /format/],
    ["{{ 'a{'.format(1) }}", /format/],
    ["{{ 'a{}'.format(['x', 1]) }}", /format/],
    ["{{ ','.join([1]) }}", /join/],
    ["{{ 'a'.strip(1) }}", /strip/],
  ])('says what it cannot: %s', (text, why) =>
    expect(() => new ChatTemplate(text, {}, 'dir').render([{ role: 'user', content: 'a' }])).toThrow(why),
  );

  it('that renders not even one question is known for it', () => {
    const problem = (text: string) => new ChatTemplate(text, {}, 'dir/chat_template.jinja').problem;
    expect(problem('{% for m in messages %}{{ m.content }}{% endfor %}')).toBeUndefined();
    expect(problem('{{ messages[0].content | nonsense }}')).toMatch(
      /^dir\/chat_template\.jinja: chats will be refused \(.*nonsense.*\); correct the chat template, or use completions$/,
    );
  });

  it('is told who speaks', () => {
    const template = new ChatTemplate(
      '{% for m in messages %}{{ m.name or m.role }}: {{ m.content }};{% endfor %}',
      {},
      'dir',
    );
    const asks = { role: 'user', content: 'a' } as const;
    expect(template.render([{ ...asks, name: 'Ann' }, asks])).toBe('Ann: a;user: a;');
  });
});

describe('a damaged folder is one clear line', () => {
  let dir: string;
  beforeEach(() => {
    dir = mkdtempSync(join(tmpdir(), 'kvtier-tokenizer-'));
    for (const name of ['tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json']) {
      cpSync(join(demoDir, name), join(dir, name));
    }
  });
  afterEach(() => rmSync(dir, { recursive: true, force: true }));
  const damage = (change: (file: Record<string, unknown>) => void) => {
    const file = readDemo('tokenizer.json');
    change(file);
    writeFileSync(join(dir, 'tokenizer.json'), JSON.stringify(file));
  };

  it.each<[string, () => void, RegExp]>([
    ['missing', () => rmSync(join(dir, 'tokenizer.json')), /tokenizer\.json: cannot be read \(ENOENT\); its folder/],
    ['cut off', () => writeFileSync(join(dir, 'tokenizer.json'), '{"model": {'), /tokenizer\.json: not valid JSON/],
    ['a list', () => writeFileSync(join(dir, 'tokenizer.json'), '[]'), /tokenizer\.json: not a JSON object/],
    ['without a model', () => damage((file) => delete file.model), /not a tokenizer/],
    ['with an empty vocabulary', () => damage((file) => (file.model = { type: 'BPE', vocab: {}, merges: [] })), /./],
    ['of another kind', () => damage((file) => (file.decoder = { type: 'WordPiece' })), /"WordPiece" is not served/],
    ['with a broken template', () => writeFileSync(join(dir, 'chat_template.jinja'), '{% if %}'), /does not parse/],
  ])('%s', (_, act, message) => {
    act();
    const thrown = (() => {
      try {
        loadTokenizer(dir);
      } catch (error) {
        return error as Error & { code: string };
      }
    })();
    expect(thrown).toMatchObject({ name: 'KvError', code: 'MODEL' });
    expect(thrown!.message).toMatch(message);
    expect(thrown!.message).toContain(dir);
    expect(thrown!.message).not.toContain('\n');
  });

  it('no template at all: chat is refused, completion is not', () => {
    writeFileSync(join(dir, 'tokenizer_config.json'), '{}');
    const bare = loadTokenizer(dir);
    expect(bare.encode(' 34', { addSpecialTokens: true })).toHaveLength(1);
    expect(() => bare.chatPrompt([{ role: 'user', content: 'hi' }])).toThrow('no chat template');
  });
});

function libraryDecode(ids: readonly number[]): string {
  if (ids.length === 0) return '';
  return library.decode(ids, { skip_special_tokens: true, clean_up_tokenization_spaces: false });
}
