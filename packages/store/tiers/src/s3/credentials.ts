/**
 * Credentials in the format of Amazon's shared credentials file (AWS SDKs and Tools Reference Guide): `[PROFILE]`, and below it
 * `aws_access_key_id`, `aws_secret_access_key` and, of temporary ones, `aws_session_token`, each with `=` and its value in one line.
 */

export interface S3Credentials {
  readonly accessKeyId: string;
  readonly secretAccessKey: string;
  readonly sessionToken?: string;
}

const maxFileBytes = 64 << 10;
const names = ['aws_access_key_id', 'aws_secret_access_key', 'aws_session_token'] as const;
type Name = (typeof names)[number];

/** @throws Error: what is missing, or is no value of a header */
export function credentialsIn(file: Buffer, profile: string): S3Credentials {
  if (file.length > maxFileBytes) throw new Error(`is larger than ${maxFileBytes} bytes`);
  let isOurs = false;
  let isThere = false;
  const found: Partial<Record<Name, string>> = {};
  for (const whole of file.toString('utf8').split(/\r?\n/)) {
    const line = whole.trim();
    const section = /^\[\s*(?:profile\s+)?([^\]]*?)\s*\]/.exec(line);
    if (section !== null) {
      isOurs = section[1] === profile;
      isThere ||= isOurs;
      continue;
    }
    const equals = line.indexOf('=');
    if (!isOurs || equals === -1 || line.startsWith('#') || line.startsWith(';')) continue;
    const name = names.find((known) => known === line.slice(0, equals).trim().toLowerCase());
    if (name !== undefined) found[name] = line.slice(equals + 1).trim();
  }
  if (!isThere) throw new Error(`has no profile ${profile}`);
  const { aws_access_key_id: accessKeyId, aws_secret_access_key: secretAccessKey, aws_session_token: token } = found;
  const of = (name: Name, value: string | undefined): string => {
    if (value === undefined) throw new Error(`has no ${name} in profile ${profile}`);
    if (!/^[\x21-\x7e]+$/.test(value)) throw new Error(`has an ${name} in profile ${profile} that is none`);
    return value;
  };
  return {
    accessKeyId: of('aws_access_key_id', accessKeyId),
    secretAccessKey: of('aws_secret_access_key', secretAccessKey),
    ...(token === undefined ? {} : { sessionToken: of('aws_session_token', token) }),
  };
}
