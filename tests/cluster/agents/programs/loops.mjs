// Runs the loops of one client and reports each as a line of JSON: what it saw, or how it failed.
import { z } from 'zod'

export const [URL, MODEL] = process.argv.slice(2)
export const HUGE = 'a line of a long file\n'.repeat(60)
export const RESULTS = { Rome: 'Rome: sonnig, 25 °C 🌞', Oslo: '' }
export const PIXEL = 'data:image/png;base64,iVBORw0KGgo='
export const City = z.object({ name: z.enum(['Rome', 'Oslo']), days: z.union([z.literal(1), z.literal(2)]) })

const report = (loop, seen) => console.log(JSON.stringify({ loop, ...seen }))

export async function run(name, loop) {
  try {
    report(name, { seen: JSON.stringify(await loop())?.slice(0, 300) ?? '' })
  } catch (error) {
    report(name, { error: `${error.stack} ${error.responseBody ?? ''}`.slice(0, 3000) })
  }
}

export async function refused(name, loop, says) {
  try {
    report(name, { error: `was not refused: ${JSON.stringify(await loop())}`.slice(0, 500) })
  } catch (error) {
    report(name, error.message.includes(says) ? { refused: error.message } : { error: error.stack })
  }
}

export function same(one, other) {
  if (JSON.stringify(one) !== JSON.stringify(other)) throw new Error(`${JSON.stringify(one)} !== ${JSON.stringify(other)}`)
}

export function check(condition, what) {
  if (!condition) throw new Error(JSON.stringify(what))
}
