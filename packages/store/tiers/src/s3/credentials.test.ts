import { expect, it } from 'vitest';
import { credentialsIn } from './credentials.ts';

const read = (text: string, profile = 'default'): unknown => credentialsIn(Buffer.from(text), profile);

it.each([
  ['[default]\naws_access_key_id = A\naws_secret_access_key = s/+=\n', 'default', { secretAccessKey: 's/+=' }],
  ['[default]\r\naws_access_key_id=A\r\naws_secret_access_key=s', 'default', { secretAccessKey: 's' }],
  [
    '# ours\n[other]\naws_access_key_id = B\naws_secret_access_key = t\n[kv]\n; new\naws_secret_access_key = s\naws_access_key_id = A\n' +
      'aws_session_token = long==\nregion = here\n[last]\naws_access_key_id = C\n',
    'kv',
    { secretAccessKey: 's', sessionToken: 'long==' },
  ],
  ['[ profile kv ]\nAWS_ACCESS_KEY_ID = A\naws_secret_access_key = s', 'kv', { secretAccessKey: 's' }],
])('%j has them', (text, profile, more) => {
  expect(read(text, profile)).toEqual({ accessKeyId: 'A', ...more });
});

it.each([
  ['', 'has no profile default'],
  ['aws_access_key_id = A\naws_secret_access_key = s', 'has no profile default'],
  ['[other]\naws_access_key_id = A\naws_secret_access_key = s', 'has no profile default'],
  ['[default]\naws_secret_access_key = s', 'has no aws_access_key_id in profile default'],
  ['[default]\naws_access_key_id = A\n#aws_secret_access_key = s', 'has no aws_secret_access_key in profile default'],
  [
    '[default]\naws_access_key_id = A\naws_secret_access_key =',
    'has an aws_secret_access_key in profile default that is none',
  ],
  [
    `[default]\naws_access_key_id = A B\naws_secret_access_key = s`,
    'has an aws_access_key_id in profile default that is none',
  ],
  [
    '[default]\naws_access_key_id = A\naws_secret_access_key = s\naws_session_token = \u00e9',
    'has an aws_session_token in profile default that is none',
  ],
  [`[default]\n${'#'.repeat(65_536)}`, 'is larger than 65536 bytes'],
])('%.60j is refused', (text, why) => {
  expect(() => read(text)).toThrow(new Error(why));
});
