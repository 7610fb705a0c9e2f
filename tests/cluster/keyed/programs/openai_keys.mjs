// The official client for Node with each key that it is given: what it returns or throws, and how often it asked.
import OpenAI from 'openai'

const [url, keys] = [process.argv[2], JSON.parse(process.argv[3])]
const messages = [{ role: 'user', content: 'Count from 1 to 5.' }]

async function ask([name, apiKey, stream, maxRetries]) {
  let requests = 0
  const counted = (...call) => { requests++; return fetch(...call) }
  const client = new OpenAI({ baseURL: url, apiKey, maxRetries, fetch: counted })
  try {
    const answer = await client.chat.completions.create({ model: 'demo', messages, temperature: 0, max_tokens: 8, stream })
    let text = stream ? '' : answer.choices[0].message.content
    if (stream) for await (const chunk of answer) text += chunk.choices[0]?.delta?.content ?? ''
    return { name, text, requests }
  } catch (error) {
    const retry = error.headers?.get('retry-after-ms')
    return { name, error: error.constructor.name, status: error.status, code: error.code, retry, requests }
  }
}

for (const each of keys) console.log(JSON.stringify(await ask(each)))
